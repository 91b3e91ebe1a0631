"""The balancer's solver."""
