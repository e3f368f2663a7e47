"""Predict the time and memory of a step without running it, and choose the cut, the schedule and the order.

Everything in this package is computed from compiled programs and numbers, and waits for nothing.
"""
