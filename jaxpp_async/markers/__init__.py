"""The functions with which a user's step function marks stages, the microbatch loop, reductions and axis
names."""
