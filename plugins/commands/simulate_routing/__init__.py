"""`dovetail simulate-routing`: a trace of requests over simulated replicas, with the code of real routers."""
