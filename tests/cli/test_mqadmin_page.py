"""The page for users of mqadmin names an equivalent for each mqadmin command, and the equivalents exist."""

from __future__ import annotations

import re

from librmq.cli.commands.completion import options_of
from librmq.cli.syntax import COMMANDS
from tests.reference import CHECKOUT

OF_4_9 = """
addWritePerm allocateMQ brokerConsumeStats brokerStatus checkMsgSendRT cleanExpiredCQ cleanUnusedTopic cloneGroupOffset
clusterAclConfigVersion clusterList clusterRT consumeMessage consumer consumerConnection consumerProgress consumerStatus
deleteAclConfig deleteExpiredCommitLog deleteKvConfig deleteSubGroup deleteTopic exportConfigs exportMetadata
exportMetrics getAclConfig getBrokerConfig getConsumerConfig getConsumerStatus getNamesrvConfig printMsg printMsgByQueue
producer producerConnection queryCq queryMsgById queryMsgByKey queryMsgByOffset queryMsgByUniqueKey queryMsgTraceById
resetOffsetByTime resetOffsetByTimeOld sendMessage sendMsgStatus skipAccumulatedMessage startMonitoring statsAll
topicClusterList topicList topicRoute topicStatus updateAclConfig updateBrokerConfig updateGlobalWhiteAddr
updateKvConfig updateNamesrvConfig updateOrderConf updateSubGroup updateTopic updateTopicPerm wipeWritePerm
"""

PAGE = (CHECKOUT / "docs" / "mqadmin.md").read_text("utf-8")


def test_each_command_of_mqadmin_has_a_row() -> None:
    first = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert sorted(name for cell in first for name in re.findall(r"`(\w+)`", cell)) == OF_4_9.split()


def test_the_commands_that_are_named_exist() -> None:
    for name, rest in re.findall(r"`librmq ([a-z-]+)([^`]*)`", PAGE):
        assert name in COMMANDS
        options = set(re.findall(r"--[a-z-]+", rest))
        assert options <= set(options_of(name)), f"librmq {name}{rest}"
