"""The measurements of `palestra bench`: sampling and training speed, and the calibration of the cost model."""
