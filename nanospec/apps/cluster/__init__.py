"""Several engines, run with Ray (extra [ray]) on this machine or on the cluster at RAY_ADDRESS."""
