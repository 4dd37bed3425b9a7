"""What a checkpoint is made of, how it gets to the disk while a run goes on, and how it is found whole again."""
