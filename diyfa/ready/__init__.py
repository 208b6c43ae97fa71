"""Ready at once: the kernels of calls are compiled before the calls come.

`calls.py` has the calls that a pack serves, `models.py` those of a model, `words.py` what a user writes;
`recording.py` finds out which kernels calls would launch, `building.py` has them compiled by several processes
(`worker.py`), and `warming.py` is `diyfa.warmup`.
"""
