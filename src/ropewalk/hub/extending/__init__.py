"""What a longer context would take: rules, their effect on each band, configs, flags, what was measured."""
