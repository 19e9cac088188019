"""Page at `admin.address`: tables, plots and their live update."""
