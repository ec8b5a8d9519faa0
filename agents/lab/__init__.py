"""The lab: a small real pipeline-parallel engine with speculative decoding, and faults to put into it.

Its semantics are written once, in numpy: `scheduler` decides, `states`, `batch` and `stage` are what a rank does.
Two drivers run them: `engine` as processes over torch.distributed with a tiny transformer, `simulator`
in one process with an integer model. `faults` is the registry of faults that both accept.
"""
