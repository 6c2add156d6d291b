"""Operation `retrieve`: see `api.py` for the contract."""
