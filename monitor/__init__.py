"""The collector side of stagewatch: aligns ranks, gives verdicts, keeps incidents."""
