"""Load tests: workloads made from a seed, clients that send them on time, reports of what came back."""
