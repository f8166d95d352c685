"""From a recipe to processes: project, certificates, addresses."""
