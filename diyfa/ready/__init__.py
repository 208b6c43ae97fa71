"""Ready at once: compile the kernels of calls before the calls come.

`calls.py` has the calls that a pack serves, `models.py` those of a model, `words.py` those that a user describes.
`recording.py` finds the kernels that calls would launch, `building.py` compiles them in several processes
(`worker.py`), and `warming.py` is `diyfa.warmup`.
"""
