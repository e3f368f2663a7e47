"""failures: what is known of a failure in, who is to blame and what to say of it out. Pure but for `deadlines`.

monitor, stuck       who is silent; which steps stand still
autopsy              who was first of those who wait for each other
failure              the words of errors
awake, deadlines     time in which we could have heard of others
"""
