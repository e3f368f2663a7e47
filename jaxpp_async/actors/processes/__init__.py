"""processes: what actors are made of: how many, whose, and where; how one is spawned, kept and ended.

seats, actor_info                      which process is whose; where it is
actor_request, actor_process, warden   what to start; one that was started; the thread that owns them all
commands, run_module                   how our own programs are started; that which runs a module of this very package
lifeline, exit_codes                   how a process notices that nobody needs it, and how it ends
progress                               a page of memory in which it says where it is
keeper, keeper_protocol                the same on another host, and what is said to it
"""
