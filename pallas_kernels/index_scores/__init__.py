"""Operation `index_scores`: see `api.py` for the contract."""
