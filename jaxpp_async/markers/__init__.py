"""The marks of a user's step function: stages, the microbatch loop, reductions and logical axis names."""
