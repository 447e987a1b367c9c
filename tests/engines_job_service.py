"""Beam's Python job service, with several workers per job. Arguments: port, workers."""

import signal
import sys
from typing import Any

from apache_beam.portability.api import beam_job_api_pb2
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.runners.portability.local_job_service import BeamJob, LocalJobServicer


class Job(BeamJob):
    """A job on several workers; Beam's own has one."""

    def _invoke_runner(self) -> Any:
        self.set_state(beam_job_api_pb2.JobState.RUNNING)
        runner = FnApiRunner(provision_info=self._provision_info)
        runner._num_workers = int(sys.argv[2])
        return runner.run_via_runner_api(self._pipeline_proto, self.pipeline_options())


LocalJobServicer(beam_job_type=Job).start_grpc_server(int(sys.argv[1]))
signal.pause()
