"""From a recipe to the parts of a run: method, plan, data, module, job, and what is recorded of them."""
