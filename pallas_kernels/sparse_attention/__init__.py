"""Operation `sparse_attention`: see `api.py` for the contract."""
