"""Ways to evaluate one function for K members: vmapped or in turn, a batch at once or in parts."""
