"""Takes recorded steps of a run again, and says where what they compute first differs from what was recorded."""
