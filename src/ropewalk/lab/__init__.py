"""The lab: small models, trained to compare encodings. `ropewalk lab` is its command line."""
