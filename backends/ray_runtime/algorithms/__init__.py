"""The mathematics of the algorithms: pure functions on packed tensors, each naming its source. No model, no state."""
