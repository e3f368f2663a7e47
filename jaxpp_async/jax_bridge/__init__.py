"""jax_bridge"""
