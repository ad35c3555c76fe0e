"""A library that tests patch."""


def double(x):
    return 2 * x


class Layer:
    def forward(self, x):
        return x
