"""What several files of tests share. Imported as ``from helpers.scaler import scaler_of``."""
