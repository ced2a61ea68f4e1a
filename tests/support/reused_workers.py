"""Worker processes that several gateways use one after the other: starting one takes seconds."""

from palestra.servers.gateway.workers import GatewayWorkers


class ReusedWorkers(GatewayWorkers):
    """Stay alive when their gateway is closed."""

    def close(self) -> None:
        for worker in self._workers:
            socket = worker.socket.dup()
            worker.disconnect()
            worker.socket = socket

    def end(self) -> None:
        self.close()
        super().close()
