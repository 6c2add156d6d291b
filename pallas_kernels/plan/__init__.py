"""Operation `plan`: see `api.py` for the contract."""
