"""devices: JAX and CUDA in an actor's process, and the GPUs of its host.

starting, cluster                JAX started; of several processes, joined
compute, device_work, cuda       calls on a thread; what GPUs have done, and when; the one door to CUDA
special_values                   NaNs and infinities, for whoever asked for errors
gpus, nvml                       which GPUs a host has, and who gets which
"""
