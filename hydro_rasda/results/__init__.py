"""What people see of a run: its record, its result, reports, exports, and the recipe of a winner."""
