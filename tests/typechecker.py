"""The run-time type checker of ``NWFLOW_TYPECHECK=1``: beartype, for which an int is a float as it is for PEP 484."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
