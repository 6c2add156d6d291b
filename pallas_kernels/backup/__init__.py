"""Operation `backup`: see `api.py` for the contract."""
