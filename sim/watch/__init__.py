"""A latency model beside live traffic: pace, predicted TTFT beside seen, other cache sizes, drift."""
