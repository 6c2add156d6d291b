"""Operation `fp8_products`: see `api.py` for the contract."""
