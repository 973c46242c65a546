"""The placement policies, one a file. Reach them through `controller.solver.policies()`."""
