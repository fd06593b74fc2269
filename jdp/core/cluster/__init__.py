"""A cluster of processes, over JAX's coordination service.

initialize  joins, and exits when another process fails; `schedulers` reads Slurm, Open MPI and Kubernetes
roll_call   waits for all processes before they join, and names those that are missing
barrier     waits for every process, and names those that are missing; the service's client
handshake   compares how the processes were started; `agreement` compares what they will compute
"""
