"""What a machine was measured to take for the stages of a flow, as a small file that estimates come from."""
