"""The contract that the exporter and the runtime share: schema, formats, errors, effective precision."""
