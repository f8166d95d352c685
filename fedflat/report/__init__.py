"""What a run leaves behind: its records, comparison tables and the self-contained HTML report."""
