"""The functions with which a user marks stages, the microbatch loop, reductions and axis names in a step."""
