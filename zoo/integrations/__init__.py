"""zoo in other libraries' training loops: a file for each, which imports that library."""
