"""Steps of single ranks on FakeTensors: bytes, FLOPs and messages counted, time modelled."""
