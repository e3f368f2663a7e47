"""The commands of the command line `jaxpp-async`, one module a command; `app` lists them.

A command imports JAX, and whatever imports JAX, inside its function, so that `--help` answers at once.

    checkpoint        lists checkpoints, shows what is in one, and checks it
    demo              trains a small model on processes here, and shows a step of it
    doctor            would a run work on this machine, or on other hosts
    page              makes a page of a file, for a browser
    plan              chooses the cut, the schedule and the order of a user's step
    schedule          draws a schedule, or compares several
    simulate          predicts the time and the memory of a user's step
    timeline          shows where the time of a saved step went

Commands are made of:

    app               lists the commands
    load_step         finds the step function and its arguments in a user's module
    step_options      options that `plan` and `simulate` share, and the machines that they describe
    schedule_text     reads a schedule such as `Std1F1B(4, stages="balanced")` without running code
    output            errors, exit statuses, progress, and text as wide as the terminal
"""
