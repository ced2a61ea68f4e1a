"""Better instructions and tool descriptions, found by reflection on what the measures say.

Begin with `improve.py`; `search.py` is the algorithm, and knows neither models nor agents.
"""
