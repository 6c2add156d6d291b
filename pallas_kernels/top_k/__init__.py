"""Operation `top_k`: see `api.py` for the contract."""
