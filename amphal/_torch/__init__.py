"""What amphal knows of torch beyond its public interface. Nothing of amphal but errors is below.

``private`` holds the uses of private names, each with its reason and the versions it was checked
on; ``matmul`` torch's float32 matmul precision; ``nested`` the tensors in nested values.
"""
