"""What was recorded in formats that other tools read: Parquet, Perfetto, HTML."""
