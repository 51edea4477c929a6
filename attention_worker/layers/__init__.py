"""Parts of a decoder layer, as frozen data with one call each. `loader.py` puts them together."""
