"""Ways to evaluate a function for K members: under vmap or one after another, on a whole batch or on parts of it."""
