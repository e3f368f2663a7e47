"""steps: an actor's programs, loaded and run.

loading, executables, loaded_program    text in, a program ready to step out
machine                                 what it runs on
step_run, device_step_run               one step: the executor's commands carried out
catching_up                             the processes of an actor, brought to the same task
relaying                                what other processes of the actor need of it, passed on
stuck_report                            where a step is that does not go on
"""
