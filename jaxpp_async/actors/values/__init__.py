"""values: arrays on their way: what lies where, in pieces and whole.

numpy_types, parts        a dtype by its name; which part of an array lies in which process
crossings, turns          which pieces a transfer has; over which link, and in what order
shards, receive_pool      arrays on devices <-> bytes; memory to receive into
host_values, scattering   numpy arrays in and out of an actor; taken apart for several processes
"""
