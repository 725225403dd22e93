"""`freshper compare`: arms x seeds of training from one YAML file, one table of evaluations, one report."""
